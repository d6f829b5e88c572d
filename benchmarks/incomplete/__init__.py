"""Rows with missing values: imputation beside scikit-learn, and training on images with gaps."""
