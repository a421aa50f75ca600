def main():
    from ..engine import foo
    print("hi", foo.x, __file__)
