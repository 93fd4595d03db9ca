"""What many draws of a network predict together."""
