"""Runs packed for other people: the files that evaluate, play and continue them, and a card that describes them."""
