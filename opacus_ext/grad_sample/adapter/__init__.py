"""The adapter between the core and Opacus's loop of model, criterion and optimizer."""
