"""A server of several machines on Ray Serve: an ingress with the routes, and replicas with the engines.

Ray is imported by this package alone, and by nothing but `hetero-kv serve --cluster` and
`hetero_kv.serving.cluster:app`.
"""
