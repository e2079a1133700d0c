#include <gatefold/runtime/canonical.h>
#include <gatefold/runtime/error.h>

#include <cstdio>

// What a program that links the installed package may count on.
int main() {
  try {
    const gatefold::Blocks blocks{.width = 1536, .count = 8};
    const gatefold::SumTree tree(blocks);
    const auto roots = tree.local_plan(gatefold::owned_blocks(8, 3, 1)).roots;
    std::printf("rank 1 of 3 ships %d roots; 100 rows make tiles of %lld\n", roots,
                static_cast<long long>(gatefold::tile_rows(100)));
    return roots > 0 ? 0 : 1;
  } catch (const gatefold::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
}
