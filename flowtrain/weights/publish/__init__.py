"""The publisher: writes the changes of the weights as immutable versions."""
