// RUN: %opt %s -p 'stack-results{tile=1}' | %filecheck %s

// Moments of two fields of two cells: one contraction with a dimension for the fields. What writes
// the fields writes into their stack; the sums are cleared together, and read from their stack.

"memref.global"() <{sym_name = "table", type = memref<3x4xf64>, initial_value = dense<2.0> : tensor<3x4xf64>, sym_visibility = "private", constant, alignment = 64 : i64}> : () -> ()
func.func @loop(%x: memref<4x2xf64>, %y: memref<3x2xf64>) {
  %table = memref.get_global @table : memref<3x4xf64>
  %a = memref.alloca() {alignment = 64 : i64} : memref<4x2xf64>
  %b = memref.alloca() {alignment = 64 : i64} : memref<4x2xf64>
  %sum_a = memref.alloca() {alignment = 64 : i64} : memref<3x2xf64>
  %sum_b = memref.alloca() {alignment = 64 : i64} : memref<3x2xf64>
  %zero = arith.constant 0.0 : f64
  linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%x : memref<4x2xf64>) outs(%a, %b : memref<4x2xf64>, memref<4x2xf64>) {
  ^bb0(%v: f64, %old_a: f64, %old_b: f64):
    %square = arith.mulf %v, %v : f64
    linalg.yield %v, %square : f64, f64
  }
  linalg.fill ins(%zero : f64) outs(%sum_a : memref<3x2xf64>)
  linalg.fill ins(%zero : f64) outs(%sum_b : memref<3x2xf64>)
  linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d0, d2)>], iterator_types = ["parallel", "reduction", "parallel"]} ins(%table, %a, %b : memref<3x4xf64>, memref<4x2xf64>, memref<4x2xf64>) outs(%sum_a, %sum_b : memref<3x2xf64>, memref<3x2xf64>) {
  ^bb0(%t: f64, %u: f64, %v: f64, %old_a: f64, %old_b: f64):
    %p = arith.mulf %t, %u : f64
    %new_a = arith.addf %old_a, %p : f64
    %q = arith.mulf %t, %v : f64
    %new_b = arith.addf %old_b, %q : f64
    linalg.yield %new_a, %new_b : f64, f64
  }
  linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%sum_a, %sum_b : memref<3x2xf64>, memref<3x2xf64>) outs(%y : memref<3x2xf64>) {
  ^bb0(%u: f64, %v: f64, %old: f64):
    %difference = arith.subf %u, %v : f64
    linalg.yield %difference : f64
  }
  func.return
}

// CHECK:       %[[FIELDS:.*]] = memref.alloca() {alignment = 64 : i64} : memref<2x4x2xf64>
// CHECK-NEXT:  %[[SUMS:.*]] = memref.alloca() {alignment = 64 : i64} : memref<2x3x2xf64>
// CHECK-NOT:   memref.alloca
// CHECK:       linalg.generic
// CHECK-SAME:  affine_map<(d0, d1) -> (0, d0, d1)>, affine_map<(d0, d1) -> (1, d0, d1)>
// CHECK-SAME:  outs(%[[FIELDS]], %[[FIELDS]] :
// CHECK:       linalg.fill ins(%zero : f64) outs(%[[SUMS]] : memref<2x3x2xf64>)
// CHECK-NOT:   linalg.fill
// CHECK:       linalg.generic
// CHECK-SAME:  indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d1, d2)>, affine_map<(d0, d1, d2, d3) -> (d0, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>]
// CHECK-SAME:  iterator_types = ["parallel", "parallel", "reduction", "parallel"]
// CHECK-SAME:  ins(%table, %[[FIELDS]] : memref<3x4xf64>, memref<2x4x2xf64>) outs(%[[SUMS]] : memref<2x3x2xf64>)
// CHECK:       linalg.generic
// CHECK-SAME:  ins(%[[SUMS]], %[[SUMS]] :
