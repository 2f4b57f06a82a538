#pragma once

#include "tile_grid.h"

namespace dash::schedule {

// Chains of one kind of a block of heads, which are issued one after the other.
struct Stretch {
    bool rotating;  // or descending
    int first_head, heads;
    int first_claim;
};

// The order of issue of symmetric_shift: heads in blocks, of each block its rotating chains (R, of the lower KV tiles),
// and behind them its descending ones (U, of the upper ones), which are short where those were long.
//
//   R0 U0   R1 U1   R2 U2      Blocks that fill the SMs: each CTA takes one chain of either kind, and all end together.
//   R0   R1 U0   R2 U1   U2    Others, in turns: CTAs that R0 leaves over start R1, and U0 fills what R1 leaves over.
struct FoldedBlocks {
    int rotating, descending;  // chains a head
    int heads;
    int heads_per_block;
    int last_block;  // it has all heads that are left
    bool in_turns;

    DASH_HD Stretch stretch(int claim) const {
        int const block_claims = heads_per_block * (rotating + descending);
        if (!in_turns) {
            int const block = min_of(quotient(claim, block_claims), last_block);
            return stretch_of_pair(block, block * block_claims, claim, block);
        }
        int const lead = rotating * heads_of(0);
        if (claim < lead) return {true, 0, heads_of(0), 0};
        int const tail = heads * (rotating + descending) - descending * heads_of(last_block);
        if (claim >= tail) return {false, last_block * heads_per_block, heads_of(last_block), tail};
        int const block = min_of(quotient(claim - lead, block_claims), last_block - 1);
        return stretch_of_pair(block + 1, lead + block * block_claims, claim, block);
    }

  private:
    DASH_HD int heads_of(int block) const {
        return block < last_block ? heads_per_block : heads - last_block * heads_per_block;
    }
    // From first_claim on there are the rotating chains of one block, and then the descending ones of one.
    DASH_HD Stretch stretch_of_pair(int rotates, int first_claim, int claim, int descends) const {
        int const border = first_claim + rotating * heads_of(rotates);
        if (claim < border) return {true, rotates * heads_per_block, heads_of(rotates), first_claim};
        return {false, descends * heads_per_block, heads_of(descends), border};
    }
};

}  // namespace dash::schedule
