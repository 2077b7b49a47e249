"""Where bytes move: verified uploads and checked downloads. Everything above uses these."""
