"""Several machines as one: which replica answers a request, and what replicas tell of themselves."""
