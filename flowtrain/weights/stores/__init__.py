"""Places that hold versions: a folder, a server behind HTTP, a bucket."""
