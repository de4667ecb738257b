"""One optimizer step, written a second time, slowly: what every faster path is held to."""
