"""Updates of an algorithm from minibatches: losses, gradients, optimizers, plain and compiled."""
