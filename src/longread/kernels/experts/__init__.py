"""Routed experts whose weights stay quantised, and the router in front of them, for a device."""
