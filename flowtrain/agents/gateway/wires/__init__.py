"""The APIs that programs speak: each reads requests into one plain form, and writes replies."""
