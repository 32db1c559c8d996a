"""The commands of the first hour."""
