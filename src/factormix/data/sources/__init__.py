"""Sources of rows: in memory, in files, in shards or in a stream; in order or shuffled."""
