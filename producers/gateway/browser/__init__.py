"""The script by which pages send feedback, served as it stands here, and its types."""
