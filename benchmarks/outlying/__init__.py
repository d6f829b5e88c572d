"""Outlier detection on tables and images: data, methods, verdicts and the page."""
