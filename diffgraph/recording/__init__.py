"""One forward becomes a recording, and is found to be true."""
