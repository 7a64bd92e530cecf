"""Parts of bodies, which stand between the inputs of a network and its head."""
