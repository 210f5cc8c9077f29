"""What every part of Tandem agrees on: configuration, requests, plans, messages, events, errors."""
