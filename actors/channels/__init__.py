"""A2E and E2A channels between attention ranks and expert ranks."""
