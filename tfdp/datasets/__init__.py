"""Data sets as records of privacy units: readers of files, and builders for TensorFlow Datasets."""
