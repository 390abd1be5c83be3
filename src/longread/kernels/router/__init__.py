"""Which experts a token goes to, and with which weight."""
