"""Plans of batches and deployments, and their makespans."""
