"""A real cluster of two replicas on this machine, for measurements of its routers and of its overhead."""
