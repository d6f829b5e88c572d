"""Files and folders as rows.

.npy, .safetensors, Parquet and Arrow files, and folders of them, are read where they lie. .npz and
.csv files and images are converted block by block into a temporary file, which goes when its rows
are closed or forgotten. Memory does not grow with the source.
"""

from factormix.data.readers.reading import read_rows

__all__ = ["read_rows"]
