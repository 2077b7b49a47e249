"""What brings objects to a disk, files to a store, and objects from one store to another: every byte that can be compared is."""
