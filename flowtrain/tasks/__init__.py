"""Sources of questions: facts of a small corpus, the game of 24, files, and benchmarks."""
