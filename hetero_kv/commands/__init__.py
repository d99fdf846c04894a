"""The commands of `hetero-kv` other than the chat."""
