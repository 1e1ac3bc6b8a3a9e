// RUN: %opt %s -p 'split-results' | %filecheck %s
// RUN: %opt %s -p 'split-results' --print-op-generic | %iree-opt -o /dev/null

// Two sums of products, the second of a branch: each gets an operation with what it reads. What is
// not a sum, and a result that reads the other's sum, stay as they are.

func.func @sums(%x: tensor<4x?xf64>, %y: tensor<4x?xf64>, %zero: tensor<?xf64>) -> (tensor<?xf64>, tensor<?xf64>) {
  %a, %b = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%x, %y : tensor<4x?xf64>, tensor<4x?xf64>) outs(%zero, %zero : tensor<?xf64>, tensor<?xf64>) {
  ^bb0(%u: f64, %v: f64, %old_a: f64, %old_b: f64):
    %square = arith.mulf %u, %u : f64
    %new_a = arith.addf %old_a, %square : f64
    %positive = arith.cmpf ogt, %u, %v : f64
    %chosen = scf.if %positive -> (f64) {
      scf.yield %v : f64
    } else {
      scf.yield %square : f64
    }
    %new_b = arith.addf %old_b, %chosen : f64
    linalg.yield %new_a, %new_b : f64, f64
  } -> tensor<?xf64>, tensor<?xf64>
  func.return %a, %b : tensor<?xf64>, tensor<?xf64>
}

// CHECK-LABEL: func.func @sums
// CHECK:       %[[A:.*]] = linalg.generic {{.*}} ins(%x : tensor<4x?xf64>) outs(%zero : tensor<?xf64>)
// CHECK-NEXT:  ^{{.*}}(%[[U:.*]]: f64, %[[OLD:.*]]: f64):
// CHECK-NEXT:    arith.mulf %[[U]], %[[U]]
// CHECK-NEXT:    arith.addf %[[OLD]]
// CHECK-NEXT:    linalg.yield
// CHECK:       %[[B:.*]] = linalg.generic {{.*}} ins(%x, %y : tensor<4x?xf64>, tensor<4x?xf64>) outs(%zero : tensor<?xf64>)
// CHECK:         arith.cmpf ogt
// CHECK:         scf.if
// CHECK-NOT:   linalg.generic
// CHECK:       func.return %[[A]], %[[B]]

func.func @others(%x: tensor<4x?xf64>, %zero: tensor<?xf64>) -> (tensor<?xf64>, tensor<?xf64>, tensor<4x?xf64>, tensor<4x?xf64>) {
  %a, %b = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%x : tensor<4x?xf64>) outs(%zero, %zero : tensor<?xf64>, tensor<?xf64>) {
  ^bb0(%u: f64, %old_a: f64, %old_b: f64):
    %new_a = arith.addf %old_a, %u : f64
    %new_b = arith.addf %old_b, %old_a : f64
    linalg.yield %new_a, %new_b : f64, f64
  } -> tensor<?xf64>, tensor<?xf64>
  %c, %d = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%x : tensor<4x?xf64>) outs(%x, %x : tensor<4x?xf64>, tensor<4x?xf64>) {
  ^bb0(%u: f64, %old_c: f64, %old_d: f64):
    %square = arith.mulf %u, %u : f64
    linalg.yield %square, %u : f64, f64
  } -> tensor<4x?xf64>, tensor<4x?xf64>
  func.return %a, %b, %c, %d : tensor<?xf64>, tensor<?xf64>, tensor<4x?xf64>, tensor<4x?xf64>
}

// CHECK-LABEL: func.func @others
// CHECK:       %{{.*}}, %{{.*}} = linalg.generic
// CHECK:       %{{.*}}, %{{.*}} = linalg.generic

func.func @exchanged(%x: tensor<4x?xf64>, %zero: tensor<?xf64>) -> (tensor<?xf64>, tensor<?xf64>) {
  %a, %b = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%x : tensor<4x?xf64>) outs(%zero, %zero : tensor<?xf64>, tensor<?xf64>) {
  ^bb0(%u: f64, %old_a: f64, %old_b: f64):
    %new_b = arith.addf %old_b, %u : f64
    linalg.yield %old_b, %new_b : f64, f64
  } -> tensor<?xf64>, tensor<?xf64>
  func.return %a, %b : tensor<?xf64>, tensor<?xf64>
}

// CHECK-LABEL: func.func @exchanged
// CHECK:       %{{.*}}, %{{.*}} = linalg.generic
