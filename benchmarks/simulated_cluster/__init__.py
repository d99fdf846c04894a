"""A model of many replicas behind a router, for a discrete-event simulation."""
