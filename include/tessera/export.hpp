// SPDX-License-Identifier: Apache-2.0
// Symbol visibility: everything is hidden except what is marked TESSERA_EXPORT.
#pragma once

#define TESSERA_EXPORT __attribute__((visibility("default")))
