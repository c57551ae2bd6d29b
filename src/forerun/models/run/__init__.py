"""What runs a model: the protocol, the layers' parts, and the runners."""
