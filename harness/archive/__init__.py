"""What is kept on the disk, and read again. It must not judge."""
