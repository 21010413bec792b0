"""The contenders, a module for each library; a library is imported when its contender is made."""
