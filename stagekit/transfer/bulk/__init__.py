"""Copying many objects at once: engines behind one contract (``base``), none of which is believed."""
