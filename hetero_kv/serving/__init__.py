"""Many requests to one model at a time: sampling, requests, the scheduler, and the engine's thread."""
