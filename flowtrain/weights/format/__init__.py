"""The bytes of a version: manifest, layout, full snapshots, deltas and their checksums."""
