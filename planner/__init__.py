"""Pure decisions: costs, orders, placement. No torch, no ray, no I/O, no clock."""
