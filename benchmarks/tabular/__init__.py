"""The benchmark on ordinary tables: its data, its fits, its verdicts and its page."""
