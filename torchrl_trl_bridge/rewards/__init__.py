"""Rewards: reward models and reward functions across the two libraries."""
