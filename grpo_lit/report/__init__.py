"""What finished and running runs say, read from the folders they log to: pages, pictures, figures."""
