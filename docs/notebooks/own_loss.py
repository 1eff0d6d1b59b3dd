# %% [markdown]
# # Own
