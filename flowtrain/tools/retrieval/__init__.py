"""Search among passages, chunks of a page or a corpus on disk, by BM25 or by embeddings."""
