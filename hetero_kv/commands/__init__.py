"""The commands of `hetero-kv` that explain and plan; none of them loads a weight."""
