"""Updates of an algorithm from minibatches: losses, gradients, optimizers, as plain Python and compiled."""
