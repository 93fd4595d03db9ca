"""Models in files: save, load, and export for use without bayesify."""
