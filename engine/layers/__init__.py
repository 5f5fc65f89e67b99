"""The layers that the native decoder is made of."""
