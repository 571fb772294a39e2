"""Which route a call takes: replay, capture or eager."""
