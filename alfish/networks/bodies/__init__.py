"""Parts of bodies, the layers between the inputs of a network and its head."""
