"""Raw data, whatever it is: listed completely first, read one sample at a time later. It knows nothing of stores that are written to."""
