"""Files and folders as rows: .npy, .npz, .csv, .parquet and folders of images.

A .npy file is read where it lies. All else is converted block by block into a temporary file, which
goes when its rows are closed or forgotten, so that memory does not grow with the source.
"""

from factormix.data.readers.reading import read_rows

__all__ = ["read_rows"]
