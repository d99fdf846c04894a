"""Documents: their formats, and the text in them."""
